"""A small Wan 2.2 I2V: its data, its training, and the score of what it makes."""
