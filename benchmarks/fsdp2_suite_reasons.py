"""Why hsdp and FSDP2 differ on cases of FSDP2's own test-suite, by CLASS::CASE."""

REASONS: dict[str, str] = {}
SAME: dict[str, str] = {}
