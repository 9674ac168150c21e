"""What every record is made of: MessagePack, arrays, names, numbers, digests."""
