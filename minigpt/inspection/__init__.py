"""Looking into a trained model, from outside: the model has no flag for it."""
