"""The decoder: beams, forest, KV pool, drafters, verification, traces. Imports nothing else of Beamwise."""
