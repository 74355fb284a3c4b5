"""Training scripts as one writes them for FSDP2; tests/api/test_fsdp2_scripts.py runs them with another import."""
