"""Random programs of what users do in a training script: `python -m tests.soak.actions`.

programs    what a program is, and how one is drawn       models, sides   what it is played on: sharded, and the twin
play        plays it on both sides and judges             excuses         where the sharded side may refuse
soak        the command                                   fsdp2           PyTorch's own as a side, for information
"""
