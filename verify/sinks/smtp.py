"""E-mail, plain text: one mail when an incident begins or gets worse, one when it is over.

Mails of one incident form a thread by its key, and a mail that is sent again has the same Message-ID. At most one a
minute by default: a mailbox is no pager.
"""

from __future__ import annotations

import hashlib
import re
import smtplib
import socket
import ssl
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import formatdate
from typing import ClassVar, Final, Literal

import msgspec

from proctor.errors import DeliveryError
from proctor.verify.notice import Action, Notice
from proctor.verify.sinks import Delivery, Secret, Sink, SinkConfig, register
from proctor.verify.sinks._http import is_loopback
from proctor.verify.sinks._text import body, cut, headline, shorten
from proctor.verify.wording import clean

MOST_SUBJECT: Final = 200
MOST_MAIL: Final = 60_000  # characters of text
_ADDRESS: Final = re.compile(r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]+@[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


class SmtpConfig(SinkConfig, frozen=True, kw_only=True):
    """`type = "smtp"`.

    Args:
        host: mail server.
        port: of it.
        security: `starttls` (the server must offer it), `tls`, or `none`, which only this host or `allow_plain` permits.
        sender: address in From; the key is `from`.
        to: who gets it.
        username: with `password`, to log in.
        password: of the user.
        allow_plain: mails in the clear to another host.
        interval_s: least seconds between two mails.
        ca_file: certificates to trust instead of the system's, PEM.
    """

    host: str
    port: int = 587
    security: Literal["starttls", "tls", "none"] = "starttls"
    sender: str = msgspec.field(name="from")
    to: tuple[str, ...]
    username: str = ""
    password: Secret | None = None
    allow_plain: bool = False
    interval_s: float = 60.0
    ca_file: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.port < 65536:
            raise ValueError("`port` must be from 1 to 65535")
        if not self.host or any(ord(c) <= 32 or ord(c) > 126 for c in self.host):
            raise ValueError("`host` is not a host name")
        if not 1 <= len(self.to) <= 50:
            raise ValueError("`to` must name from 1 to 50 addresses")
        for address in (self.sender, *self.to):
            if not _ADDRESS.fullmatch(address):
                raise ValueError(f"{clean(address, 80)!r} is not a mail address such as oncall@example.org")
        if self.security == "none" and not (self.allow_plain or is_loopback(self.host)):
            raise ValueError('security = "none" sends mails in the clear: use "starttls", or write allow_plain = true')
        if bool(self.username) != (self.password is not None):
            raise ValueError("`username` needs `password_env` or `password_file`, and the other way round")
        if self.password is not None:
            if self.security == "none" and not is_loopback(self.host):
                raise ValueError('a password is not sent in the clear: use security = "starttls" or "tls"')
            self.password.read()
        if not 0 <= self.interval_s <= 86400:
            raise ValueError("`interval_s` must be from 0 to 86400")


@register
class Smtp(Sink):
    """One mail server and the people behind it."""

    kind: ClassVar[str] = "smtp"
    Config = SmtpConfig
    merges = False
    update_s = 3600.0

    def __init__(self, name: str, config: SmtpConfig) -> None:
        super().__init__(name, config)
        self.interval_s = config.interval_s

    def send(self, delivery: Delivery) -> None:
        config: SmtpConfig = self.settings
        mail = message(delivery, config)
        handed = False  # whether the server has got the text
        server: smtplib.SMTP | None = None
        try:
            server = self._connect()
            if config.password is not None:
                server.login(config.username, config.password.read())
            handed = True
            refused = server.send_message(mail, from_addr=config.sender, to_addrs=list(config.to))
            self.left_out = ", ".join(f"{config.host} refused {clean(who, 80)} ({code})" for who, (code, _) in refused.items())
        except smtplib.SMTPRecipientsRefused as error:
            codes = [code for code, _ in error.recipients.values()]
            raise DeliveryError(f"{config.host} refused every address ({codes[0]})", retry=min(codes) < 500) from None
        except smtplib.SMTPAuthenticationError as error:
            raise DeliveryError(f"{config.host} refused the login ({error.smtp_code})", hint="is the password right?") from None
        except smtplib.SMTPResponseException as error:
            said = clean(error.smtp_error.decode(errors="replace") if isinstance(error.smtp_error, bytes) else error.smtp_error, 120)
            raise DeliveryError(f"{config.host} answered {error.smtp_code}: {said}", retry=error.smtp_code < 500) from None
        except smtplib.SMTPNotSupportedError as error:
            raise DeliveryError(f"{config.host}: {clean(error, 120)}", hint='security = "tls"?') from None
        except (smtplib.SMTPException, OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise DeliveryError(f"{config.host}: {clean(why, 120)}", unsure=handed) from None
        finally:
            if server is not None:
                try:
                    server.quit()
                except (smtplib.SMTPException, OSError):
                    server.close()  # the mail was taken, or the error is on its way

    def _connect(self) -> smtplib.SMTP:
        config: SmtpConfig = self.settings
        context = ssl.create_default_context(cafile=config.ca_file or None)
        name = socket.gethostname() or "localhost"
        if config.security == "tls":
            return smtplib.SMTP_SSL(config.host, config.port, name, timeout=config.timeout_s, context=context)
        server = smtplib.SMTP(config.host, config.port, name, timeout=config.timeout_s)
        try:
            if config.security == "starttls":
                server.starttls(context=context)
        except BaseException:
            server.close()
            raise
        return server


def message(delivery: Delivery, config: SmtpConfig) -> EmailMessage:
    """One mail."""
    notice = delivery.notice
    domain = config.sender.rpartition("@")[2]
    thread = f"<{hashlib.sha256(notice.key.encode('utf-8', 'replace')).hexdigest()[:32]}.thread@{domain}>"
    mail = EmailMessage(policy=SMTP)
    mail["From"] = config.sender
    mail["To"] = ", ".join(config.to)
    mail["Subject"] = subject(notice)
    mail["Date"] = formatdate(delivery.at, usegmt=True)
    mail["Message-ID"] = f"<{delivery.event_id}@{domain}>"
    mail["References"] = thread
    mail["In-Reply-To"] = thread
    mail["Auto-Submitted"] = "auto-generated"
    mail["X-Proctor-Key"] = clean(shorten(notice.key))
    mail.set_content(body(notice, MOST_MAIL) + f"\n\n-- \n{notice.key}\n", cte="base64")
    return mail


def subject(notice: Notice) -> str:
    """One line of at most 200 characters."""
    word = "resolved" if notice.action is Action.RESOLVE else notice.severity.value
    where = f"{cut(notice.job, 60)}: " if notice.job else ""
    return cut(f"[{word}] {where}{headline(notice, MOST_SUBJECT)}", MOST_SUBJECT)
