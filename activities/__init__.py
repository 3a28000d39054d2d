"""One module per thing that touches the world; thin: check, call relax_infer, return little."""
