"""How did Megatron-LM keep a model before distributed checkpoints? Its folders, names, orders of rows and pickles."""
