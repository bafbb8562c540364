"""What the Triton kernels show without a GPU: the bytes they move in the interpreter, the machine code they compile to.

The tests gate these figures and `python -m fusedpg bench --suite static` prints them beside other libraries'.
Triton reads TRITON_INTERPRET when it is imported: `traffic` needs it, `aot` and `code` need its absence.
"""
