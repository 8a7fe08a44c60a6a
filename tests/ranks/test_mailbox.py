"""What all ranks have to say is printed once, what one has to say is printed too."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch.distributed as dist

from lightning_zero.ranks import mailbox
from tests.harness import on_ranks


def printed(text: str) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        mailbox.say_once(text)
    return said.getvalue()


@on_ranks(2, 3)
def test_a_text_of_all_ranks_is_printed_once_and_any_other_by_each() -> None:
    rank = dist.get_rank()
    assert printed("all ranks fail alike") == ("" if rank else "all ranks fail alike\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mailbox, "SAID_S", 0.2)
        assert printed(f"rank {rank} fails") == f"rank {rank} fails\n"
        if rank == 1:
            assert printed("this rank alone fails") == "this rank alone fails\n"
