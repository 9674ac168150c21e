"""Commands about a stack as a whole: it starts, ends, is copied and brought back."""
