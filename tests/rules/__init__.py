"""One test file per rule of RULES.md from 10 on, named after the rule."""
