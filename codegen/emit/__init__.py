"""Stage 5: the emitters, one a module; each writes down what resolve decided."""
