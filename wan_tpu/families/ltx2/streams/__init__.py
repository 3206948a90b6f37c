"""The two streams of an LTX-2 transformer, which attend to each other, and what modulates both."""
