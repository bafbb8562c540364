"""Triton kernels. `fusedpg.gpu` launches them; nothing here imports anything of fusedpg but the codes of `spec`."""
