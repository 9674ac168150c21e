"""Messages to environments, their replies, and the calls of the reward service that carry them."""
