"""How a run is put together: run directories, the Ray runtime and the one-process runtime."""
