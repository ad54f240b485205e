"""How does the Trainer get samples? One LightningDataModule for each kind of source, on a common base."""
