import { useEffect, useState } from "preact/hooks";

/** A value that components follow. */
export class Store<T> {
  private readonly followers = new Set<(value: T) => void>();

  constructor(private current: T) {}

  get value(): T {
    return this.current;
  }

  set(next: T): void {
    if (Object.is(next, this.current)) return;
    this.current = next;
    for (const follower of [...this.followers]) follower(next);
  }

  follow(follower: (value: T) => void): () => void {
    this.followers.add(follower);
    return () => this.followers.delete(follower);
  }
}

export function useStore<T>(store: Store<T>): T {
  const [value, setValue] = useState(store.value);
  useEffect(() => {
    setValue(store.value);
    return store.follow(setValue);
  }, [store]);
  return value;
}
