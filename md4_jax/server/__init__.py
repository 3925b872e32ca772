"""The playground, a web page for trying a trained model: docs/playground.md."""
