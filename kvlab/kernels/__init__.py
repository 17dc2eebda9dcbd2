"""Each kernel beside what it must equal; importing this package imports neither torch nor triton."""
