"""Five hospitals, one regression: nobody gives rows away."""
