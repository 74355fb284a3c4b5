"""When units gather, compute and reduce: the only package in which units meet.

    a step           module_hooks     runtime               reduce_order       pipeline
    forward of A     run -----------> enter_forward          (gather A, then those that gather_order expects next)
                         <----------- leave_forward          (reshard A)
    backward of A    entry hook ----> enter_backward         (gather A, and ahead)
    of the next one  entry hook ----> A's visit ends -----> whose turn? ----> submit: reduce-scatter -> all-reduce -> land
    optimizer        optimizer_hooks  (joins what is under way; afterwards weights have a new version)

    module_hooks.py     from a module's call, and from autograd, to the runtime
    optimizer_hooks.py  what an optimizer's step means to units
    step_norms.py       what an optimizer's step is told where it asks for norms of sharded tensors
    root.py             the units below one root, what they share, and what becomes of them when an iteration fails
    backward.py         a backward: which units it entered, which visits are over
    backward_commit.py  what landed in a backward stays, or is undone
    runtime.py          forwards, optimizer steps, `flush`: start reading here
    gather_order.py     the orders in which units are gathered, and so what is gathered ahead
    reduce_order.py     the order in which units are reduced, which is the same on all ranks
    passes.py           what lives for one forward or one backward, and ends with it
    sequence_numbers.py the order in which autograd nodes were made: what orders the visits of a backward
    reduce_queue.py     which reduction is sent, waited for and landed next: bounds and buckets, without tensors
    scaling.py          when sums are multiplied with the gradient factor
    byte_budget.py      how many units a window or a bound has room for, whose sizes differ
    pipeline.py         the queue of reductions, carried out
    outputs.py          the tensors through which gradients will enter a module
    closed_units.py     the error of a forward that computes with parameters of a unit which it has not called

May import `unit` and what is below it.
"""
