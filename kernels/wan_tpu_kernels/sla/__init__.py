"""The parts around sparse attention: the choice of keys, and linear attention to make up for the others."""
