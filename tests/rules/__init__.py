"""One test file per rule of RULES.md, named after the rule."""
