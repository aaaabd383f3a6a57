"""fedbench: benchmarks for personalised and Bayesian federated learning."""

__version__ = "0.1.0"
