"""The demo's model and data: a small residual network on scikit-learn's handwritten digits."""
