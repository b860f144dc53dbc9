"""Real steps beside their forecast: measuring devices and steps, watching training, explaining a full GPU."""
