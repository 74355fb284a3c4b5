"""Integers and bytes: where each parameter's elements lie in the flat buffers that are communicated. No ranks' state.

    layout.py          the plan of a buffer: pieces, offsets, padding
    views.py           views of packed rows and of whole parameters that fit each other, and copies between them
    flat_buffer.py     memory that is allocated and freed many times under the same tensor
    fingerprints.py    short numbers that tell whether values are equal

    a parameter (6 x 4) on 2 ranks:   rank 0 [ rows 0-2 ]   rank 1 [ rows 3-5 ]   gathered in place: [ rows 0-5 ]

May import nothing of hsdp but `debug` and `torch_private`.
"""
