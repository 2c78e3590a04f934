"""Windows over shared prefixes: composed, deduplicated, packed and evaluated."""
