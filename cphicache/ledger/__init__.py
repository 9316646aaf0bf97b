"""Free host slots of every rank, as integers that every rank keeps alike."""

from cphicache.ledger.ledger import HostLedger, LedgerAccountingError, LedgerSnapshot, Need, need_of

__all__ = ["HostLedger", "LedgerAccountingError", "LedgerSnapshot", "Need", "need_of"]
