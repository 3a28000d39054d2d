/* The two ends of the gateway's bench, cheap enough not to be what is measured.
 *
 *   wire serve PORT                          answers every request with 1 KB of JSON
 *   wire load PORT PATH CONNECTIONS SECONDS BODYFILE
 *                                            prints: answers, answers that were not 200,
 *                                            and the 50th and 99th percentile in microseconds;
 *                                            every request has an id of its own in place of
 *                                            0123456789abcdef in the body
 *
 * One thread, epoll, HTTP/1.1 with keep-alive; bodies by Content-Length or in chunks.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { EVENTS = 256, FIRST = 1 << 16, ID = 16 };

struct peer {
  int fd;
  char *in;
  size_t used, room;
  size_t sent; /* of the request that is being written */
  char id[ID + 1];
  double began;
};

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void fail(const char *what) {
  perror(what);
  exit(1);
}

static struct peer *watch(int queue, int fd, unsigned events) {
  int one = 1;
  struct peer *p = calloc(1, sizeof *p);
  p->fd = fd;
  p->room = FIRST;
  p->in = malloc(p->room);
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  fcntl(fd, F_SETFL, O_NONBLOCK);
  struct epoll_event e = {.events = events, .data.ptr = p};
  if (epoll_ctl(queue, EPOLL_CTL_ADD, fd, &e)) fail("epoll_ctl");
  return p;
}

/* Reads what is there; 0 when the other end is gone. */
static int take(struct peer *p) {
  if (p->room - p->used < FIRST / 2) p->in = realloc(p->in, p->room *= 2);
  ssize_t n = read(p->fd, p->in + p->used, p->room - p->used - 1);
  if (n > 0) p->used += (size_t)n;
  p->in[p->used] = 0;
  return n != 0;
}

/* Length of the first whole message in the buffer, or 0. */
static size_t whole(struct peer *p) {
  char *end = memmem(p->in, p->used, "\r\n\r\n", 4);
  if (!end) return 0;
  size_t head = (size_t)(end - p->in) + 4, total = head;
  *end = 0;
  char *length = strcasestr(p->in, "\ncontent-length:");
  int chunked = strcasestr(p->in, "\ntransfer-encoding: chunked") != NULL;
  if (length) total += strtoul(length + 16, NULL, 10);
  *end = '\r';
  if (!length && chunked) {
    char *last = memmem(p->in + head - 2, p->used - head + 2, "\r\n0\r\n\r\n", 7);
    if (!last) return 0;
    total = (size_t)(last - p->in) + 7;
  }
  return total <= p->used ? total : 0;
}

static void drop(struct peer *p, size_t n) {
  memmove(p->in, p->in + n, p->used - n);
  p->used -= n;
}

static struct sockaddr_in local(int port) {
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((unsigned short)port)};
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return a;
}

static void serve(int port) {
  char body[1024], answer[2048];
  memset(body, 'x', sizeof body);
  memcpy(body, "{\"text\":\"", 9);
  memcpy(body + sizeof body - 2, "\"}", 2);
  int n = sprintf(answer, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n",
                  sizeof body);
  memcpy(answer + n, body, sizeof body);
  size_t size = (size_t)n + sizeof body;
  int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0), queue = epoll_create1(0);
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  struct sockaddr_in a = local(port);
  if (bind(listener, (void *)&a, sizeof a) || listen(listener, 1024)) fail("listen");
  struct peer *door = watch(queue, listener, EPOLLIN);
  struct epoll_event events[EVENTS];
  for (;;) {
    int ready = epoll_wait(queue, events, EVENTS, -1);
    for (int i = 0; i < ready; i++) {
      struct peer *p = events[i].data.ptr;
      if (p == door) {
        int fd;
        while ((fd = accept(listener, NULL, NULL)) >= 0) watch(queue, fd, EPOLLIN);
        continue;
      }
      int alive = take(p);
      size_t message;
      while (alive && (message = whole(p))) {
        drop(p, message);
        if (write(p->fd, answer, size) < 0) alive = 0;
      }
      if (!alive) {
        close(p->fd);
        free(p->in);
        free(p);
      }
    }
  }
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void name(struct peer *p) {
  static unsigned long last;
  snprintf(p->id, sizeof p->id, "%016lx", ++last);
}

/* The request is shared, so whoever writes a part of it puts its own id in first. */
static void push(int queue, struct peer *p, char *request, size_t size, char *id) {
  if (id) memcpy(id, p->id, ID);
  while (p->sent < size) {
    ssize_t n = write(p->fd, request + p->sent, size - p->sent);
    if (n < 0) break;
    p->sent += (size_t)n;
  }
  struct epoll_event e = {.events = EPOLLIN | (p->sent < size ? EPOLLOUT : 0), .data.ptr = p};
  epoll_ctl(queue, EPOLL_CTL_MOD, p->fd, &e);
}

static int load(int port, const char *path, int connections, double seconds, const char *file) {
  FILE *f = fopen(file, "rb");
  if (!f) fail(file);
  char *request = malloc(1 << 20), *body = malloc(1 << 19);
  size_t length = fread(body, 1, 1 << 19, f);
  size_t size = (size_t)sprintf(request,
                                "POST %s HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
                                "content-length: %zu\r\n\r\n",
                                path, length);
  memcpy(request + size, body, length);
  char *id = memmem(request + size, length, "0123456789abcdef", ID);
  size += length;
  size_t room = 1 << 20, count = 0, bad = 0;
  double *times = malloc(room * sizeof *times);
  int queue = epoll_create1(0), open = 0;
  double end = now() + seconds * 1e6;
  for (; open < connections; open++) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in a = local(port);
    if (connect(fd, (void *)&a, sizeof a)) fail("connect");
    struct peer *p = watch(queue, fd, EPOLLIN);
    p->began = now();
    name(p);
    push(queue, p, request, size, id);
  }
  struct epoll_event events[EVENTS];
  while (open && now() < end + 5e6) {
    int ready = epoll_wait(queue, events, EVENTS, 100);
    for (int i = 0; i < ready; i++) {
      struct peer *p = events[i].data.ptr;
      if (events[i].events & EPOLLOUT) push(queue, p, request, size, id);
      if (!(events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))) continue;
      int alive = take(p);
      size_t message = whole(p);
      if (message) {
        double t = now();
        if (memcmp(p->in + 9, "200", 3)) bad++;
        drop(p, message);
        if (count == room) times = realloc(times, (room *= 2) * sizeof *times);
        times[count++] = t - p->began;
        if (t < end) {
          p->sent = 0;
          p->began = t;
          name(p);
          push(queue, p, request, size, id);
          continue;
        }
        alive = 0;
      } else if (!alive) {
        bad++;
      }
      if (!alive) {
        close(p->fd);
        open--;
      }
    }
    if (!ready && now() >= end) break;
  }
  qsort(times, count, sizeof *times, ascending);
  printf("%zu %zu %.1f %.1f\n", count, bad, count ? times[count / 2] : 0.0,
         count ? times[count * 99 / 100] : 0.0);
  return 0;
}

int main(int argc, char **argv) {
  if (argc == 3 && !strcmp(argv[1], "serve")) serve(atoi(argv[2]));
  if (argc == 7 && !strcmp(argv[1], "load"))
    return load(atoi(argv[2]), argv[3], atoi(argv[4]), atof(argv[5]), argv[6]);
  fprintf(stderr, "usage: wire serve PORT | load PORT PATH CONNECTIONS SECONDS BODYFILE\n");
  return 2;
}
