"""Pure decisions: integers in, frozen data out. No process group, no device, no memory."""
