"""Which tokens are sample number i: splits, blends, and the samples of each objective?"""
