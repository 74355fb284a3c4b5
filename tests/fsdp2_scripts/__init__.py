"""Training scripts as one writes them for FSDP2; tests/test_fsdp2_scripts.py runs them with another import."""
