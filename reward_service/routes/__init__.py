"""The endpoints, as the clients of the service ask them."""
