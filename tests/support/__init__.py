"""What tests and benchmarks stand on: it imports `hsdp` alone, benchmarks import it, and the other tests import both.

    rig, worker         worker pools: a function on every rank of a gloo group, in processes that outlive the test
    twin, sharded       the oracle (the same training on one device, in float64), and what a sharded model must equal
    models              regressions and language models with their batches;  graphs, deep, fragile: models of tokens or
                        floats for orders of forwards and backwards, for logs of collectives, for failures
    counting            operators counted as they go by: collectives, copies, live bytes
    virtual, best_step  a step on a clock of its own, and the best schedule that its durations allow
    device              an emulated accelerator, built on the first use
    share, facts        how many random cases to run; when and with what a number was found

`tests/test_floors.py` states the direction of the imports.
"""
