"""What a run left behind, read again and checked."""
