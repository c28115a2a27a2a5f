"""Squares of 0 to 9 on four workers: python examples/task_pool.py"""

import time

import weft


def square(x: int) -> int:
    time.sleep(1.0)
    return x * x


if __name__ == "__main__":
    with weft.pool("local:4") as pool:
        print(pool.map(square, range(10)))
