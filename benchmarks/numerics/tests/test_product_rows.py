import torch

from benchmarks.numerics import product_rows


def test_a_kernel_that_takes_another_order_for_few_rows_is_found(monkeypatch):
    monkeypatch.setattr(product_rows, "ROWS", (1, 7, 8, 30, 40))
    monkeypatch.setattr(product_rows, "WHOLE", 32)
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))

    def product(rows):
        halves = x[:rows, :32].sum(1, keepdim=True) + x[:rows, 32:].sum(1, keepdim=True)
        return halves if rows < 8 else x[:rows].double().sum(1, keepdim=True).float()

    assert product_rows.unequal(product, product(32)) == [1, 7]
