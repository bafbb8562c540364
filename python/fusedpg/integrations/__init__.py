"""Drop-ins for trainers, one module each; a module imports its trainer, the package imports none of them."""
