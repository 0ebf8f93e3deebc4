"""How RLlib and Tune learn that this package exists."""
