train_dataloader = dict(batch_size=2)
