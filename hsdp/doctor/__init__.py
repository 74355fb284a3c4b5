"""`python -m hsdp doctor`: examines this job's installation, devices and links, and says what to set.

Start reading at `command.py`; `measure.py` has the rates, `thresholds.py` what `--tune` measures.
May import everything; only the command line imports it.
"""
