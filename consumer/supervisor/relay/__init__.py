"""A trainer's log on its worker's stderr, for who looks there: `docker compose logs`."""
