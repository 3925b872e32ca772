"""The playground: a page in which to try a trained model, docs/playground.md."""
