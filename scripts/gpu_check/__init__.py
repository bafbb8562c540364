"""`make gpu-check`: build, GPU tests and CUDA benchmarks in ten minutes, and one report.

Standard library only: it runs with whatever Python a GPU machine has, makes no environment and downloads nothing.
"""
