"""Device primitives: collectives, buffers, streams. Each testable alone."""
