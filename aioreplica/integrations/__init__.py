"""Where aioreplica meets other programs: the pytest plugin, found by its entry point."""

__all__ = ()
