"""A seeded mutation fuzzer over what Beamwise reads from disk; ``python -m tests.fuzz --help``."""
