"""Copy values of shards to the host, for a thread that writes them while training goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from torch import Tensor

from lightning_zero.device.streams import Streams
from lightning_zero.engine.units.master_storage import FlatSlice, MasterStorage, ResidentStorage
from lightning_zero.tiers.pages import HOST, HostPages


class _Span:
    def __init__(self, whole: Tensor) -> None:
        self.whole = whole
        self.start, self.stop = len(whole), 0
        self.pages: HostPages | None = None

    @property
    def values(self) -> Tensor:
        return self.whole[self.start : self.stop].detach()

    @property
    def copy(self) -> Tensor:
        assert self.pages is not None
        return self.pages.tensor(0, self.whole.dtype, self.values.numel()).view(self.values.shape)


class Snapshot:
    """Copies to the host what the slices in ``wanted`` hold now: at once if user code can change it, else in
    :meth:`stage`.

    Writes to the storages wait for :meth:`stage` or :meth:`close`. ``spare`` has memory of the snapshot before for
    reuse: new memory would double the time of a copy.
    """

    def __init__(
        self, wanted: Mapping[MasterStorage, Sequence[FlatSlice]], streams: Streams, spare: list[HostPages]
    ) -> None:
        self._streams, self._spare = streams, spare
        self._spans: dict[int, _Span] = {}
        for part in (part for parts in wanted.values() for part in parts):
            span = self._spans.setdefault(id(part.whole), _Span(part.whole))
            span.start, span.stop = min(span.start, part.start), max(span.stop, part.stop)
        self._copied: Future[None] = Future()
        try:
            for storage in wanted:
                if isinstance(storage, ResidentStorage) and storage.is_exposed and id(storage.master) in self._spans:
                    self._copy(self._spans[id(storage.master)])  # at once: user code may change them without notice
        except BaseException:
            self.close()  # pages must not be dropped while they are pinned
            raise
        self._made = streams.mark()  # after the kernels that computed the values
        for storage in wanted:
            storage.lend(self._copied)

    @staticmethod
    def nbytes(wanted: Mapping[MasterStorage, Sequence[FlatSlice]]) -> int:
        """Return about how many bytes of host memory the copies take."""
        return sum(part.numel * part.whole.element_size() for parts in wanted.values() for part in parts)

    def stage(self) -> None:
        """Copy the values to the host, then let writes to the storages go on. Called in the thread that saves them."""
        accelerator = self._streams.accelerator
        accelerator.bind_thread()
        with self._streams.on("d2h", after=self._made):
            for span in self._spans.values():
                if span.pages is None:
                    self._copy(span)
            arrived = self._streams.mark()
        accelerator.wait_on_host(arrived)
        self._copied.set_result(None)

    def _copy(self, span: _Span) -> None:
        # Not torch's pinned memory, which is rounded up to a power of two.
        accelerator = HOST if span.whole.device.type == "cpu" else self._streams.accelerator
        size = span.values.nbytes, accelerator
        fits = [place for place, pages in enumerate(self._spare) if (pages.nbytes, pages.accelerator) == size]
        span.pages = self._spare.pop(fits[0]) if fits else HostPages(*size)
        span.copy.copy_(span.values, non_blocking=True)

    def read(self, part: FlatSlice) -> Tensor:
        """Return the copied values of ``part`` [numel] on the host, valid until :meth:`close`."""
        span = self._spans[id(part.whole)]
        return span.copy[part.start - span.start : part.stop - span.start]

    def close(self) -> None:
        """Let writes to the storages go on, and give the buffers back to ``spare``. It can be called twice."""
        if not self._copied.done():
            self._copied.set_result(None)
        if self._spans:
            for pages in self._spare:
                pages.close()
            self._spare[:] = [span.pages for span in self._spans.values() if span.pages is not None]
            self._spans = {}
