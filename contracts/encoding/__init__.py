"""The parts that every record is made of: MessagePack, arrays, names, numbers, digests."""
