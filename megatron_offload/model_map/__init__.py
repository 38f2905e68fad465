"""Which layers and sites a model has, and hooks where a row is."""
