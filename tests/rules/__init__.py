"""One test file per rule of docs/rules.md, named after the rule."""
