"""The policy: how it is loaded, spread, run over tokens, published and written down."""
